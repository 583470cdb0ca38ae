"""Studies of quality: what methods and their options cost in images, videos and answers."""
