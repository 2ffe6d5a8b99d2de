"""The command line, reports and plots. Code that trains imports nothing of it."""
