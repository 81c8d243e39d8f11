package e2e_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/extevict/extevict/internal/compare"
)

// BenchmarkEvict measures an eviction, from the decision until the upstream has seen
// that the request is cancelled, and until the client has its end. Budget, on a quiet
// machine: 0.5 ms until the upstream has seen it, 3 ms at the 99th percentile. An
// HTTP/1.1 client's end is the end of its connection, for which Envoy does not wait
// here.
func BenchmarkEvict(b *testing.B) {
	for _, m := range []mode{streamed, duplex} {
		w := start(b, setup{mode: m, delayedClose: new(time.Duration(0))})
		for _, ph := range phases {
			if ph.name != "waiting" && ph.name != "mid-body" {
				continue
			}
			for _, p := range w.paths[:2] {
				b.Run(fmt.Sprintf("%v/%s/%s", m, ph.name, p.name), func(b *testing.B) {
					var upstream, client []float64 // ms
					for b.Loop() {
						c := newCall(p, ph.backend)
						c.enough = len(events(3))
						w.start(b.Context(), c)
						if err := c.await(ph.reached(m)...); err != nil {
							b.Fatal(err)
						}
						if vs, err := w.evict(c); err != nil || len(vs) != 1 {
							b.Fatalf("evicted %v, %v", vs, err)
						}
						if err := c.await(backendDone, done, observed); err != nil {
							b.Fatal(err)
						}
						upstream = append(upstream, float64(c.servedAt.Sub(c.evictedAt))/float64(time.Millisecond))
						client = append(client, float64(c.doneAt.Sub(c.evictedAt))/float64(time.Millisecond))
					}
					b.ReportMetric(0, "ns/op") // mostly not of the eviction
					b.ReportMetric(compare.Median(upstream), "ms/upstream-p50")
					b.ReportMetric(compare.Percentile(upstream, 99), "ms/upstream-p99")
					b.ReportMetric(compare.Median(client), "ms/client-p50")
					b.ReportMetric(compare.Percentile(client, 99), "ms/client-p99")
				})
			}
		}
	}
}
