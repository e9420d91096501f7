"""One operator, one room: reference.py is the spec, launch.py the door."""
