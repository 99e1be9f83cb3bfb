"""`ncdwf` and `python -m ncdwf` are the command line."""

import sys

from ncdwf import __version__


def main() -> None:
    """Run the command line. Its imports take seconds: Ctrl-C may come during them as well."""
    if sys.argv[1:] == ["--version"]:  # needs none of them
        sys.stdout.write(f"ncdwf {__version__}\n")
        return
    try:
        from ncdwf.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
