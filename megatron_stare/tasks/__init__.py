"""What the policy is trained and evaluated on: prompts, how they are put, what makes a response and what judges it."""
