"""`python -m ncdwf` is the command line."""

from ncdwf.cli import main

main()
