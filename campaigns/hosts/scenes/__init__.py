"""What hosts do to one another's files: each module asks one group of questions."""
