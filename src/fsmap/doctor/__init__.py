"""`fsmap.doctor`: rank, null vectors and symmetries of 𝒥(θ; p_X)."""
