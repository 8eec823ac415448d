"""``python -m beaconscope`` is the command ``beaconscope``."""

from beaconscope.cli import main

if __name__ == "__main__":
    main()
