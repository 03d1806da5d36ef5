"""What training costs, from formulas and from counting."""
