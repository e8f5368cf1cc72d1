"""`python -m anycostfl`, the same as the command `anycostfl`."""

from anycostfl.cli import main

main()
