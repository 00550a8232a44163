"""The search for launch parameters: `normgen tune`. The only part of normgen that needs torch, triton and a GPU."""
