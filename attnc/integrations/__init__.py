"""attnc inside other libraries; each module imports its library, attnc alone imports none."""
