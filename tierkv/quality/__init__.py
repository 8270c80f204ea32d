"""``tierkv quality``: what each codec does to a user's own model and text."""
