"""The dialogs that act. Not imported when the app is read-only."""
