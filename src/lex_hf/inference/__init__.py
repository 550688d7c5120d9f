"""Reading and writing with a trained model: caches on disk, one text on several processes, an HTTP server."""
