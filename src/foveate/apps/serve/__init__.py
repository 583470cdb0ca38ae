"""Images, and answers about documents, over HTTP with the interfaces of OpenAI's API."""
