"""``adahessian report``: tables and curves of finished runs, as Markdown and as one page for a browser."""
