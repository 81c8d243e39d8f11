// Package compare measures a thing against its simplest alternative: in turns, in
// one process, so that a noisy machine is as noisy for both. What it reports are
// medians over the turns.
package compare

import (
	"runtime"
	"slices"
	"testing"
	"time"
)

// Run reports for ours, as metrics of b:
//
//	ratio       its time over that of base
//	ns/base     a base operation
//	ns/over     what an operation of ours takes more
//	allocs/over what it allocates more
//
// base and ours each do the given number of operations and must be alike in
// everything else. Take as many as last a fraction of a millisecond or more.
func Run(b *testing.B, operations int, base, ours func(operations int)) {
	b.Helper()
	one := func(f func(int)) float64 {
		t := time.Now()
		f(operations)
		return float64(time.Since(t)) / float64(operations)
	}
	base(operations)
	ours(operations)
	over := mallocs(operations, ours) - mallocs(operations, base)
	var ratios, bases, diffs []float64
	for b.Loop() {
		// Who comes second finds the caches warm: take turns.
		var x, y float64
		if len(ratios)%2 == 0 {
			x, y = one(base), one(ours)
		} else {
			y, x = one(ours), one(base)
		}
		ratios, bases, diffs = append(ratios, y/x), append(bases, x), append(diffs, y-x)
	}
	b.ReportMetric(0, "ns/op") // of a turn: says nothing
	b.ReportMetric(Median(ratios), "ratio")
	b.ReportMetric(Median(bases), "ns/base")
	b.ReportMetric(Median(diffs), "ns/over")
	b.ReportMetric(over, "allocs/over")
}

// Median returns the median of xs, which it sorts, or 0 of none.
func Median(xs []float64) float64 { return Percentile(xs, 50) }

// Percentile returns the p-th percentile of xs, which it sorts, or 0 of none.
func Percentile(xs []float64, p int) float64 {
	if len(xs) == 0 {
		return 0
	}
	slices.Sort(xs)
	return xs[min(len(xs)-1, len(xs)*p/100)]
}

func mallocs(operations int, f func(int)) float64 {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	var a, z runtime.MemStats
	runtime.ReadMemStats(&a)
	f(operations)
	runtime.ReadMemStats(&z)
	return float64((z.Mallocs - a.Mallocs) / uint64(operations)) // whole ones: the rest is the test's own
}
