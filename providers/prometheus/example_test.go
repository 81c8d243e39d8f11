package prometheus_test

import (
	"fmt"
	"net/http/httptest"
	"strings"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/providers/prometheus"
)

// yours stands for an existing ext_proc server.
var yours extprocpb.UnimplementedExternalProcessorServer

func Example() {
	ev := evictor.New()
	m := prometheus.New(ev)
	registry := prom.NewRegistry()
	registry.MustRegister(m)
	extproc.Wrap(yours, extproc.WithObserver(m.Event)) // to be registered with grpc
	pool := flowcontrol.NewPool(ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithObserver(m.Decision))
	m.Watch(pool)
	pool.SetEndpoint(flowcontrol.Endpoint{Name: "gpu-0", Capacity: 250_000})

	scraped := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(scraped, httptest.NewRequest("GET", "/metrics", nil))
	for line := range strings.Lines(scraped.Body.String()) {
		if strings.HasPrefix(line, "extevict_endpoint_capacity") || strings.HasPrefix(line, "extevict_waiting") {
			fmt.Print(line)
		}
	}
	// Output:
	// extevict_endpoint_capacity_tokens{endpoint="gpu-0"} 250000
	// extevict_waiting_requests 0
}
