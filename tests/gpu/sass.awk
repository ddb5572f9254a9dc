# Of `cuobjdump -sass`: which kernels load 16 bytes at once. By kind of kernel first, then one by one. LDG reads global
# memory; LD does the same where the compiler cannot tell which memory a pointer is into. Fails where no kernel has LDG.
function of(i) { return (i in global ? "LDG.E.128" : (i in generic ? "LD.E.128" : "-")) }
/^arch = / { arch = $3 }
/Function : / { names[++n] = $3; archs[n] = arch }
/LDG\.E[.A-Z]*\.128/ { global[n] = 1; any = 1 }
/ LD\.E[.A-Z]*\.128/ { generic[n] = 1 }
END {
  for (i = 1; i <= n; i++) {
    kind = match(names[i], /[a-z_]+_kernel/) ? substr(names[i], RSTART, RLENGTH) : names[i]
    key = kind " | " archs[i]
    if (!(key in all)) order[++k] = key
    all[key]++
    with[key, of(i)]++
  }
  print "| kernels | for | number | LDG.E.128 | LD.E.128 | neither |"
  print "|---|---|---:|---:|---:|---:|"
  for (i = 1; i <= k; i++) {
    key = order[i]
    printf "| %s | %d | %d | %d | %d |\n", key, all[key], with[key, "LDG.E.128"], with[key, "LD.E.128"], with[key, "-"]
  }
  print ""
  for (i = 1; i <= n; i++) print archs[i], of(i), names[i]
  exit !any
}
