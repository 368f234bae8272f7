"""What changes after an asynchronous save was begun is not in its checkpoint."""
