"""Line widgets: each draws whole lines of its own and repaints only those that changed."""
