"""Mutation proof: each known kind of fault is planted in a generated module, and its generated test has to see it."""
