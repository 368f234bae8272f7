"""Google Cloud Storage, through its XML API."""
