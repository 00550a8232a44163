"""`normgen verify`: the generated test of a spec, run on anybody's implementation of it.

There is one text of the checks, `templates/test.py.jinja`. For an implementation from elsewhere it is rendered with
another head, `templates/tests/foreign.jinja`, which calls that function where the generated test calls its module, and
without the tests of what only a generated module has (its operator, its strategies, its messages). Truth is the formula
of the module that the spec makes, which is rendered beside it; nothing else of that module is used.

What is rendered runs under pytest in a process of its own, for an implementation may crash, hang or change what it
imports. `run` starts it, waits no longer than it was told to, and reads what `child` wrote down test by test; `kinds`
says which kind of fault a failing test shows, and `subject` finds and calls the implementation.
"""
