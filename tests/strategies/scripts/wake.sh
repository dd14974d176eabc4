# Wakes process $1 once the file `steps` has 36 lines, or after $2 tenths of a second. `handed_out` gets the number of lines.
i=0
while [ "$(wc -l < steps)" -lt 36 ] && [ $i -lt "$2" ]; do sleep 0.1; i=$((i+1)); done
wc -l < steps > handed_out
kill -CONT "$1"
