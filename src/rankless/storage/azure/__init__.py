"""Azure Blob Storage."""
