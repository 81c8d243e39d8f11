package otel_test

import (
	"context"
	"fmt"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/providers/otel"
)

// yours stands for an existing ext_proc server.
var yours extprocpb.UnimplementedExternalProcessorServer

func Example() {
	reader := metric.NewManualReader() // a periodic one with an exporter in production
	provider := metric.NewMeterProvider(metric.WithReader(reader))
	ev := evictor.New()
	m, err := otel.New(provider.Meter("example.com/gateway"), ev)
	if err != nil {
		panic(err)
	}
	defer m.Close()
	extproc.Wrap(otel.Server(yours), extproc.WithObserver(m.Event)) // to be registered with grpc
	pool := flowcontrol.NewPool(ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithObserver(m.Decision))
	m.Watch(pool)
	pool.SetEndpoint(flowcontrol.Endpoint{Name: "gpu-0", Capacity: 250_000})

	var all metricdata.ResourceMetrics
	if err := reader.Collect(context.Background(), &all); err != nil {
		panic(err)
	}
	for _, x := range all.ScopeMetrics[0].Metrics {
		if x.Name == "extevict.endpoint.kv_cache.limit" {
			fmt.Println(x.Name, x.Data.(metricdata.Sum[int64]).DataPoints[0].Value, x.Unit)
		}
	}
	// Output: extevict.endpoint.kv_cache.limit 250000 {token}
}
