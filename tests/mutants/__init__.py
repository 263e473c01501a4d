"""Measures which faults the tests find, by planting them one by one. CONTRIBUTING.md has the commands.

cosmic-ray generates faults of a folder; ``cosmic-ray.toml`` names the folder and its tests, ``sample.py`` draws some.
``by_hand.py`` has fifty more. All are planted in the files of the current folder, so run them in a copy of the
repository.
"""
