"""The stage balancer: layers and recompute per pipeline rank for the fastest step that fits. Imports the cost model
around it; only ``scipy`` beyond numpy."""
