"""Long proofs, each with a command of its own; the tests run a short form of them."""
