"""The `reprise` command, with one module per subcommand."""
