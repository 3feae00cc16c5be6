"""The names and signatures of other libraries, in modules named after them: Qwix, AQT, MaxText."""
