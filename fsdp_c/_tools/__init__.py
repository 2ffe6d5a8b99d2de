"""The command line, reports and plots. Code that trains imports no module of this package."""
