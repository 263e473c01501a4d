"""The command of the GPU check: ``make gpu-check``."""

from tests.gpu.check import main

main()
