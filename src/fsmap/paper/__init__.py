"""Every figure and table of the paper as something that runs with one command."""
