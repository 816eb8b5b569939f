"""The runs and the page of docs/support.md."""
