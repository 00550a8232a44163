"""The stages of a normalisation, in pipeline order: what each adds to a spec, and the mathematics it stands for."""
