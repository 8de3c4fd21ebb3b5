"""The chat page: page.html, and its headers in page.py."""
