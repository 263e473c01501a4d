"""``python -m launch.gpu_check``: the check on a machine without this project's environment."""

from launch.gpu_check.command import main

main()
