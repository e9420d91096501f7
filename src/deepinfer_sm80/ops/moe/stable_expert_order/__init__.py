"""Put the routes of every expert into token order, so that a repeated run rounds alike."""
