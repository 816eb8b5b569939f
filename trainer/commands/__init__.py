"""The command `reprise`: one module for each subcommand."""
