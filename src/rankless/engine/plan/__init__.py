"""Plans which rank reads or writes which bytes. Pure functions: no I/O, no communication."""
