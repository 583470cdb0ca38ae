"""HTML pages: comparisons, answers about documents, and the studio in the browser."""
