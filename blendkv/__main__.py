"""`python -m blendkv`: the command line."""

from blendkv.cli import main

if __name__ == "__main__":
    main()
