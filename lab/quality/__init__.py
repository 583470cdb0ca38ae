"""Studies of quality: effects of methods and their options on images, videos and answers."""
