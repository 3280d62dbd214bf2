"""`python -m polyrhythm` is the command `polyrhythm`."""

from polyrhythm.cli.main import entry

if __name__ == "__main__":
    entry()
