"""Communication between ranks: sessions, votes, and the key-value store that they use."""
