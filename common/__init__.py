"""The ground that everything stands on; it imports nothing of the project.

    files.py  JSON lines that nothing tears, and the one kind of error that a user sees
    cli.py    a parser and the exit codes of every program
"""
