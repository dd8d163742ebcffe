"""`make gpu-check`: what a card does with this project, in at most eight minutes."""
