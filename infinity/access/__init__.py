"""Operations on one offloaded model: open, fill, gather, read exact values, resume, pin and replay."""
