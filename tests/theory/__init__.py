"""Steps small enough that what they must communicate can be derived by hand, and those derivations."""
