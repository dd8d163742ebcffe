"""The widgets of the screens. Each owns its CSS and bindings; none opens a file."""
