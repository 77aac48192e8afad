"""`python -m megamoe` is the command line."""

from megamoe.cli.main import main

main()
