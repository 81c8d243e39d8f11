// Custom Aborter: the engine hears of an eviction before the client does. Evictions
// then work too where a hop between Envoy and the engine swallows resets.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/examples/internal/passthrough"
	"github.com/extevict/extevict/extproc"
)

func main() {
	listen := flag.String("listen", "127.0.0.1:9002", "address to serve ext_proc on")
	flag.Parse()
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		log.Fatal(err)
	}

	ev := evictor.New(evictor.WithAborter(abort.AborterFunc(func(ctx context.Context, h *abort.Handle, _ abort.Reason) error {
		return abortOnEngine(ctx, h.Requests()) // then the evictor ends the stream; an error spares the request
	})))

	go evictEachMinute(ev)
	s := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(s, extproc.Wrap(passthrough.Server{}, extproc.WithTracker(ev, describe)))
	log.Fatal(s.Serve(l))
}

// abortOnEngine tells each engine that holds a part of the request. This is vLLM's
// call, which it serves when started with --enable-scale-out.
func abortOnEngine(ctx context.Context, legs []abort.Request) error {
	var errs []error
	for _, leg := range legs {
		if leg.Key == "" {
			errs = append(errs, errors.New("no key: an empty list may mean everything"))
			continue
		}
		body, err := json.Marshal(map[string][]string{"request_ids": {leg.Key}})
		if err != nil {
			return err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+leg.Endpoint+"/inference/v1/abort_requests", bytes.NewReader(body))
		if err != nil {
			return err
		}
		req.Header.Set("Content-Type", "application/json")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			errs = append(errs, fmt.Errorf("%s: %s", leg.Endpoint, resp.Status))
		}
	}
	return errors.Join(errs...)
}

// describe says where the request runs and what the engine calls it. A key must never
// be of a client's choosing, or it could name somebody else's request. x-request-id is
// Envoy's own if the connection manager has use_remote_address and lacks
// preserve_external_request_id: then Envoy replaces what an external client sent.
func describe(_ context.Context, req *extprocpb.ProcessingRequest) (abort.Request, bool) {
	for _, h := range req.GetRequestHeaders().GetHeaders().GetHeaders() {
		if h.Key == "x-request-id" {
			return abort.Request{Priority: -1, Endpoint: "10.0.0.7:8000", Key: "cmpl-" + string(h.RawValue) + "-0"}, true
		}
	}
	return abort.Request{Priority: -1, Endpoint: "10.0.0.7:8000"}, true
}

// evictEachMinute stands for your scheduler.
func evictEachMinute(ev *evictor.Evictor) {
	for range time.Tick(time.Minute) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		victims, err := ev.Evict(ctx, evictor.Demand{N: 1, Below: 0, Reason: abort.Preempted})
		cancel()
		log.Printf("evicted %d: %v", len(victims), err)
	}
}
